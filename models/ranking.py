"""Classification heads of models that rank: what the file must have, and how the head is recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrun.models.params import Keys

if TYPE_CHECKING:
    from localrun.models.plan import Recorder
    from localrun.models.program import Activation
    from localrun.models.weights import Weights

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Head:
    """labels: values that it gives for each sequence; 0: there is no head."""

    labels: int = 0

    @classmethod
    def read(cls, keys: Keys) -> Head:
        """As pooling_type 4 asks for. One value is a score as it is; of two, the share of the first one ("yes") is. Raises ModelFileError
        for other labels.
        """
        if keys.int("pooling_type", 0) != 4:
            return cls()
        labels = keys.strings("classifier.output_labels", [""])
        if len(labels) != 1 and labels != ["yes", "no"]:
            raise keys.error("classifier.output_labels", f"has {len(labels)} labels; to rank, one is supported, or yes and no")
        return cls(len(labels))

    def tensors(self, width: int) -> Shapes:
        """What must be there."""
        return {"cls.output.weight": (width, self.labels)} if self.labels else {}

    def optional(self, width: int) -> Shapes:
        """What may be there."""
        more: Shapes = {"cls.output.bias": (self.labels,), "cls.weight": (width, width), "cls.bias": (width,)}
        return more if self.labels else {}


def score(r: Recorder, w: Weights, h: Activation) -> None:
    """The head, where the file has one, on the last hidden states of the rows that are asked for."""
    if not w.has("cls.output.weight"):
        return
    dense = w.matrix("cls.weight") if w.has("cls.weight") else None
    r.score(h, w.matrix("cls.output.weight"), w.maybe("cls.output.bias"), dense=dense, dense_bias=w.maybe("cls.bias"))
