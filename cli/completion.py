"""Names that the shell offers after Tab."""

from __future__ import annotations

COMPLETION_SECONDS = 0.5


def complete_model(incomplete: str) -> list[str]:
    """Names of models that begin so, from a daemon that runs already. A person who pressed Tab gets nothing rather than an error."""
    from localrun.cli.client import Client, CliError
    from localrun.cli.environment import BadAddress, address

    try:
        with Client(address()) as client:
            models = client.get("/api/tags", timeout=COMPLETION_SECONDS).get("models") or []
    except (CliError, BadAddress):
        return []
    names = (str(model.get("name", "")).removesuffix(":latest") for model in models)
    return [name for name in names if name.startswith(incomplete)]
