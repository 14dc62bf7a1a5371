"""feddkd cache: what the engines have learned about speed, and compiled programs."""

import json
from typing import Annotated

import typer

from feddkd.cli.console import AsJson
from feddkd.engines.choice_cache import cache_contents, cache_folder, empty_cache
from feddkd.engines.memory import in_words


def cache(
    empty: Annotated[bool, typer.Option("--empty", help="Delete everything in the cache.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the cache of chosen strategies and compiled programs, or empty it.

    FEDDKD_CACHE=off switches the cache off, FEDDKD_CACHE=FOLDER moves it. Without a cache a run
    only takes longer until it has found the fastest strategy.
    """
    folder = cache_folder()
    if empty:
        empty_cache()
    files, size = cache_contents()
    if as_json:
        where = None if folder is None else str(folder)
        print(json.dumps({"folder": where, "files": files, "bytes": size}))
    elif folder is None:
        print("the cache is switched off by FEDDKD_CACHE")
    else:
        parts = ", ".join(f"{count} {part}" for part, count in files.items()) or "empty"
        print(f"{folder}: {parts}, {in_words(size)}")
