# SPDX-License-Identifier: Apache-2.0
"""Rules about what shipped code may do: no network, and no code from data."""

import ast
from collections.abc import Iterator

from structure.tree import Tree, Violation

NETWORK = {"socket", "urllib", "http", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "ssl"}
# Loading either runs what the file says.
CODE_FROM_DATA = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml"}
# Beside tests; torch_suite is a test that packages inherit, and pickles what it made.
NOT_SHIPPED = ("/integration/", "/test_support/", "/torch_suite/", "hatch_build.py")
RUNNING = {"eval", "exec", "compile"}


def shipped_code(tree: Tree) -> Iterator[Violation]:
    """What a distribution ships neither opens a connection nor runs what a file holds."""
    for source in tree.python:
        if source.is_test or not source.path.startswith(("core/src/", "packages/")):
            continue
        if any(part in source.path for part in NOT_SHIPPED):
            continue
        for node in source.nodes:
            for what, why in _found(node):
                message = f"{what} {why}, which shipped code must not"
                yield Violation(source.path, getattr(node, "lineno", 1), "shipped-code", message)


def _found(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(what is used, what it does)"""
    modules = []
    if isinstance(node, ast.Import):
        modules = [name.name for name in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        modules = [node.module or ""]
    for module in modules:
        if module.split(".")[0] in NETWORK:
            yield module, "reaches the network"
        if module.split(".")[0] in CODE_FROM_DATA:
            yield module, "runs code that data holds"
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Name) and function.id in RUNNING:
            yield f"{function.id}()", "runs text"
        if isinstance(function, ast.Attribute) and ast.unparse(function) == "torch.load":
            safe = any(
                k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords
            )
            if not safe:
                yield "torch.load without weights_only=True", "runs code that data holds"
