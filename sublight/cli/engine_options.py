"""The options of the model and of the engine that `generate` and `serve` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sublight.engines.generate.engine import Engine

Model = Annotated[str, typer.Argument(metavar="FOLDER", help="With config.json, *.safetensors, tokenizer.json.")]
Batch = Annotated[int, typer.Option(metavar="N", help="Texts at a time, at most.")]
Chunk = Annotated[int, typer.Option(metavar="N", help="Tokens of a step: longer prompts are cut.")]
Cache = Annotated[int, typer.Option(metavar="N", help="Tokens that the cache holds; default: as many as needed.")]
Mode = Annotated[str, typer.Option(metavar="NAME", help="ours or eager.")]
Dtype = Annotated[str, typer.Option(metavar="TYPE", help="Default: bf16 on a GPU, fp32 on a CPU.")]
Weights = Annotated[str, typer.Option(metavar="WAY", help="Pack them: int4, int8, fp8 …; int4+head: the head, too.")]
Graphs = Annotated[bool, typer.Option(help="Replay decoding as CUDA graphs.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    model: str
    batch: int = 64
    chunk: int = 512
    cache: int = 0
    mode: str = "ours"
    dtype: str = ""
    weights: str = ""
    graphs: bool = True
    device: str = ""

    @property
    def folder(self) -> Path:
        return Path(self.model)

    def build(self, *, cache: int = 0, longest: int = 0) -> Engine:
        """The engine; weights are read last. `cache`: its tokens without --cache; `longest`: tokens of one text."""
        from sublight.cli.train import device_named
        from sublight.engines.generate.build import Build, build

        return build(
            Build(
                folder=self.folder,
                device=device_named(self.device),
                mode=self.mode,
                dtype=self.dtype,
                weights=self.weights,
                batch=self.batch,
                chunk=self.chunk,
                cache=self.cache or cache,
                longest=longest,
                graphs=self.graphs,
            )
        )
