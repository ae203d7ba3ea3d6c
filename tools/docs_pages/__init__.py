# SPDX-License-Identifier: Apache-2.0
"""The pages of the site that are generated, and what every page must fulfil."""
