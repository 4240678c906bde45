"""Triton's interpreter, without work that it repeats to the same effect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_language_once() -> None:
    """Have `triton.language` patched once for a launch, not again for each call of a function in its kernel.

    The interpreter replaces the builtins of `triton.language` for the time of a launch. It looks for some to replace at
    each call of a `triton.jit` function in a kernel too, when none is left: half the time of kernels that call many.
    """
    original = interpreter._patch_lang

    @functools.cache
    def languages(function: Callable[..., Any]) -> list[ModuleType]:
        """The modules of the language that a function sees."""
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def patch(function: Callable[..., Any]) -> Any:
        if all(not tl.core.is_builtin(language.load) for language in languages(function)):
            return interpreter._LangPatchScope()  # with nothing to restore
        return original(function)

    interpreter._patch_lang = patch
