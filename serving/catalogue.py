"""`jaxstate models`: what can be pulled, what is in the cache, and which families are supported."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxstate.models import registry, sources
from jaxstate.serving import local_model, terminal


def run(*, as_json: bool, cache_dir: pathlib.Path, out: Console) -> None:
    """Print models and families; or one JSON object a line."""
    models, families = known_models(cache_dir), supported_families()
    if as_json:
        for line in (*models, *families):
            out.file.write(json.dumps(line) + "\n")
        return
    table = Table("model", "size", "licence", title="Models that `jaxstate pull` knows")
    table.add_column("where", overflow="fold")
    for model in models:
        table.add_row(
            model["model"], f"{model['bytes'] / 1e6:,.0f} MB", model["licence"],
            model["path"] or "not pulled",
        )
    out.print(table)
    table = Table("family", "config.json architectures", "GGUF architecture", title="Families")
    for family in families:
        table.add_row(
            family["family"], ", ".join(family["architectures"]), family["gguf"] or "as llama"
        )
    out.print(table)
    terminal.say(
        out, "Any GGUF file or Hugging Face directory of these families can be given by its path."
    )


def known_models(cache_dir: pathlib.Path) -> list[dict[str, Any]]:
    """Describe the models `pull` knows; `path` is None where the cache lacks one."""
    directory = local_model.models_dir(cache_dir)
    found = []
    for name, source in sources.SOURCES.items():
        path = sources.cached_path(name, cache_dir=directory)
        found.append(
            {
                "model": name, "bytes": source.size_bytes, "licence": source.licence,
                "path": str(path) if local_model.is_there(name, cache_dir) else None,
            }
        )
    return found


def supported_families() -> list[dict[str, Any]]:
    """Describe the families by the names that files give them."""
    return [
        {
            "family": family.name, "architectures": list(family.hf.architectures),
            "gguf": family.gguf.architecture if family.gguf else None,
        }
        for family in registry.FAMILIES
    ]
