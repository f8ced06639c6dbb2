"""Which kernel: the words by which programs ask for one, and the cache and the compiler name it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSpec:
    """`factory` in module `module` of this package, with its compile-time parameters."""

    module: str
    factory: str
    params: tuple[int | str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join([self.module, self.factory, *map(str, self.params)])
