"""``kvcal recipes``: what ships, and what is wrong with a file."""

from __future__ import annotations

import shutil
import textwrap
from typing import Annotated

import typer

from kvcal import terminal
from kvcal.errors import UsageError
from kvcal.options import Json

app = typer.Typer(help="List, show and validate recipes.", rich_markup_mode=None)


@app.command("list")
def recipes_list(as_json: Json = False) -> None:
    """List the recipes that kvcal ships.

    Example: kvcal recipes list
    """
    from kvcal import recipe

    _print_named({name: recipe.load(name).description for name in recipe.shipped()}, as_json)


@app.command("schemes")
def recipes_schemes(as_json: Json = False) -> None:
    """List the schemes that `kvcal compare` knows by name.

    Example: kvcal recipes schemes
    """
    from kvcal import scheme

    found = {name: scheme.load(name).description for name in scheme.shipped()}
    _print_named(found, as_json)


@app.command("show")
def recipes_show(
    name: Annotated[str, typer.Argument(help="Name of a shipped recipe, or a file.")], as_json: Json = False
) -> None:
    """Print a recipe with every default filled in.

    Example: kvcal recipes show fp8-per-head
    """
    from kvcal import recipe

    found = recipe.load(name)
    if as_json:
        terminal.print_json(found.model_dump())
    else:
        typer.echo(found.to_yaml(), nl=False)


@app.command("validate")
def recipes_validate(
    name: Annotated[str, typer.Argument(help="Recipe file.")], as_json: Json = False
) -> None:
    """Report every fault of a recipe at once.

    Example: kvcal recipes validate recipes/fp8-ci.yaml
    """
    from kvcal import recipe
    from kvcal.errors import RecipeError

    try:
        recipe.load(name)
    except RecipeError as error:
        if as_json:
            terminal.print_json({"ok": False, "faults": error.faults})
        else:
            for fault in error.faults:
                typer.echo(fault)
        count = len(error.faults)
        terminal.fail(UsageError(f"{name}: {count} fault{'s' if count > 1 else ''}"))
    if as_json:
        terminal.print_json({"ok": True, "faults": []})
    else:
        typer.echo(f"{name}: valid")


def _print_named(found: dict[str, str], as_json: bool) -> None:
    """Names and what they stand for, as a document or as lines that fit the terminal."""
    if as_json:
        terminal.print_json(found)
        return
    indent = max(map(len, found)) + 2
    columns = shutil.get_terminal_size().columns
    for name, description in found.items():
        line = f"{name:<{indent}}{description}"
        typer.echo(textwrap.fill(line, columns, subsequent_indent=" " * indent))
