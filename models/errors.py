"""The one error of this layer."""

from __future__ import annotations


class ModelFileError(Exception):
    """A model file cannot be used. `str(error)` is one line: the file's name, the field at fault, what is wrong, what to do."""

    def __init__(self, path: object, field: str, problem: str) -> None:
        super().__init__(f"{path}: {field}: {problem}" if field else f"{path}: {problem}")
        self.path = str(path)
        self.field = field
        self.problem = problem
