"""Bodies and answers of localrun's own endpoints about models on disk: plans, bundles, the state of the store. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localrun.api.fields import Body, honoured
from localrun.store.check import Problem, Report
from localrun.store.header import Found, largest_that_fits
from localrun.store.plan import Plan


class PlanBody(Body):
    """POST /api/plan."""

    model: str = honoured(..., "A model's name, hf.co/OWNER/REPO:QUANT, address of a .gguf file, or its path (clients on this machine).")
    num_ctx: int = honoured(0, "Tokens of context for each user; 0: the model's own.", ge=0)
    users: int = honoured(1, "Contexts to have room for at once.", ge=1, le=65_536)
    kv_cache_type: str = honoured("", "Number format of the KV cache; empty: as the server is set.")
    insecure: bool = honoured(False, "Accept plain HTTP, for an address that begins with http://.")


class ExportBody(Body):
    """POST /api/export: some models as one stream of bytes, for /api/import of another machine."""

    models: list[str] = honoured(..., "Names of the models.")
    offset: int = honoured(0, "Bytes to leave out at the beginning: those that came before an interruption.", ge=0)


class CheckBody(Body):
    """POST /api/check: compares every file of the store with its digest."""

    repair: bool = honoured(False, "Remove what is damaged or of no use; a pull brings again what is needed.")
    stream: bool = honoured(True, "Send progress, one JSON object a line; false: one object at the end.")


class PartialsBody(Body):
    """DELETE /api/partials: forgets interrupted downloads; those under way stay."""

    digest: str = honoured("", "Of one download; empty: all of them.")


def plan_reply(model: str, found: Found, plan: Plan, threads: int, bandwidth: float) -> dict[str, Any]:
    """/api/plan. bandwidth: bytes a second of all threads together, 0: not known."""
    reply = {"model": model, "source": found.source, "download": found.download, **plan.to_json()}
    reply |= {"threads": threads, "bandwidth": round(bandwidth)}
    if found.others:
        weights = plan.weights + plan.embedding
        reply["choices"] = [
            {"quantization": one.label, "size": one.size, "fits": plan.total - weights + one.size <= plan.available} for one in found.others
        ]
        reply["largest_that_fits"] = largest_that_fits(found.others, lambda size: plan.total - weights + size <= plan.available)
    return reply


def report_reply(report: Report) -> dict[str, Any]:
    """The last object of /api/check."""
    return {
        "status": "success",
        "sound": report.sound,
        "models": report.models,
        "blobs": report.blobs,
        "bytes": report.bytes,
        "problems": [_problem(one) for one in report.problems],
    }


def _problem(problem: Problem) -> dict[str, Any]:
    return {
        "kind": problem.kind,
        "text": problem.text,
        "harm": problem.harm,
        "bytes": problem.bytes,
        "repaired": problem.repaired,
    }


def partials_reply(partials: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """GET and DELETE /api/partials: what is there, or what was removed."""
    return {"partials": [{"digest": digest, "size": size} for digest, size in partials]}
