# SPDX-License-Identifier: Apache-2.0
"""What records say, shown: tables and plots, from records alone.

tables.py arranges rows, plots.py draws them and alone needs matplotlib, page.py shows both.
"""
