# SPDX-License-Identifier: Apache-2.0
"""What records say, shown: tables and plots, from records alone.

tables.py arranges rows, sizes.py tells which of them differ in their number of rows alone,
plots.py draws them and alone needs matplotlib, page.py shows both.
"""
