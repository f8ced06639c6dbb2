"""`localrun serve`: the one command that is the daemon instead of talking to it, so the one place that imports it, inside the function."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from localrun.cli.client import CliError
from localrun.cli.environment import for_serving


class ServeCommand(TyperCommand):
    """Its help ends with the table of settings."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from localrun.settings_page import settings_text

        formatter.write(f"\nSettings, from the environment:\n{settings_text(min(formatter.width, 100))}")


def serve(
    host: Annotated[str, typer.Option("--host", metavar="HOST[:PORT]", help="Address to listen on, in place of LOCALRUN_HOST.")] = "",
    gpu_layers: Annotated[
        int | None,
        typer.Option("--gpu-layers", metavar="N", min=-1, help="Layers to put on NVIDIA cards; -1: as many as fit, 0: none."),
    ] = None,
    idle_exit: Annotated[
        float, typer.Option("--idle-exit", metavar="SECONDS", help="End after so many seconds without a request; 0: never.", min=0)
    ] = 0.0,
) -> None:
    """Run the daemon in this terminal. Environment variables set it: docs/settings.md, or --help.

    \b
    Examples:
      localrun serve
      localrun serve --host 127.0.0.1:11500
    """
    import dataclasses

    from localrun.daemon.serve import serve as run_daemon
    from localrun.errors import LocalrunError
    from localrun.settings import Settings

    try:
        settings = Settings.from_env(for_serving(host))
        if idle_exit:
            settings = dataclasses.replace(settings, idle_exit=idle_exit)
        if gpu_layers is not None:
            settings = dataclasses.replace(settings, gpu_layers=gpu_layers)
        run_daemon(settings)
    except LocalrunError as error:
        raise CliError(str(error)) from None
