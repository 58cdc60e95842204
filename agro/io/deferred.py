"""A module that is imported when it is first used.

torch takes two seconds to import. Most commands import modules that would use it, and end without.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class DeferredModule(ModuleType):
    """Stands for a module until an attribute is asked for, and then becomes it."""

    _spec: ModuleSpec

    def __getattr__(self, name: str) -> Any:
        loader = self._spec.loader
        assert loader is not None
        object.__setattr__(self, "__class__", ModuleType)
        self.__dict__["__path__"] = self._spec.submodule_search_locations
        loader.exec_module(self)
        return getattr(self, name)


def install(name: str) -> None:
    """Let `import name` cost nothing until the module is used."""
    spec = PathFinder.find_spec(name)
    if spec is None or name in sys.modules:
        return
    module = DeferredModule(name)
    module.__dict__.update(_spec=spec, __spec__=spec, __loader__=spec.loader, __file__=spec.origin)
    sys.modules[name] = module
