"""A trained run of Q-RAG: its towers, as a retriever of this process or as a folder with a card.

The folder has two models of sentence-transformers. `state` embeds states (the question and the
chunks taken so far), `chunk` embeds chunks. Both give the same vectors as in training.
`retriever.json` holds all other settings that a search needs, so that the folder is a retriever.
The encoder's scale (0.1 for the mean of BERT's hidden states, as in Q-RAG) is multiplied into the
trunk's last norm: every pooling is linear, so vectors come out scaled, in any server of embeddings.
Normalised vectors lose a factor in the norm; theirs stays a module of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import qrag_jax
from qrag_jax.environments import positions
from qrag_jax.environments.chunks import state_width
from qrag_jax.errors import InputError
from qrag_jax.learners.state import both, both_towers, encoder_key, params_shardings, place
from qrag_jax.metrics import facts, stopping
from qrag_jax.models import first_encoder, pretrained
from qrag_jax.models.compute.attention import THETA
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.embedding import Params, TextEncoder
from qrag_jax.models.files import sentence_transformers
from qrag_jax.models.files.weight_names import save_folder
from qrag_jax.retrieval.towers import TOWER_END, RowForm, Towers
from qrag_jax.rollouts.chunks import CHUNK, STATE
from qrag_jax.runtime import retriever_config as retriever_file
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.config_fields import flat, read_fields
from qrag_jax.runtime.mesh import make_mesh, shardings_of
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.retriever_config import RetrieverConfig
from qrag_jax.runtime.whole_files import check_is_free, sha256, whole_folder
from qrag_jax.systems import retriever, scoring
from qrag_jax.systems.config import ADAPTER, CARD, TEMPLATES, without_folders
from qrag_jax.systems.indexing import PassageEncoder, mesh_towers, on_host, one_tower, scale_outside
from qrag_jax.systems.q_rag.config import QRagConfig, settled


@dataclasses.dataclass(frozen=True)
class SavedRun:
    workdir: Path
    config: QRagConfig
    raw: dict[str, Any]  # the config, as it was given
    fields: dict[str, Any]  # the same by names with dots, with all open fields settled
    mesh: Mesh
    loaded: pretrained.LoadedEncoder
    # Where the parameters live: two towers stacked on axis 0, or (`Adapted`) their adapters
    # stacked, over one base
    shardings: Params | Adapted

    @classmethod
    def open(
        cls,
        workdir: Path,
        config: ConfigDict,
        mesh_of: Callable[[tuple[int, int, int]], Mesh] = make_mesh,
    ) -> SavedRun:
        """Reads the encoder of a run; its config may have other data or settings of evaluation."""
        taken = QRagConfig.of(config, scoring=True)
        mesh = scoring.mesh_of_run(taken, workdir, mesh_of)
        how: Any = {"is_kept": True, "platform": Platform.of(mesh)}
        loaded = first_encoder.prepare_encoder(taken.encoder, workdir, [], taken.seed, **how)
        rules = loaded.trunk.partition_rules()
        trained = params_shardings(mesh, rules, loaded.trained)
        shardings = merge(trained, shardings_of(mesh, rules, loaded.base))
        fields = flat(settled(config, loaded.encoder).to_dict())
        return cls(workdir, taken, config.to_dict(), fields, mesh, loaded, shardings)

    def trained(self, which: str) -> tuple[Params | Adapted, int]:
        """The parameters of the "best" or the "last" checkpoint, and their optimizer step."""
        shapes = jax.eval_shape(both, self.loaded.trained)
        trained, step = scoring.saved_params(self.workdir, which, shapes, self._trained_shardings)
        return merge(trained, self._base), step

    def chosen(self, checkpoint: str = "") -> str:
        """The checkpoint that is used: the given one, else the best one if that is trained."""
        if not checkpoint and Checkpoints(self.workdir, read_only=True).best_step() == 0:
            raise InputError(
                f"the best checkpoint of {self.workdir} is that of step 0, the untrained weights; "
                "give --checkpoint=last for the trained ones, or --checkpoint=best for these."
            )
        return checkpoint or "best"

    def untrained(self) -> Params | Adapted:
        loaded = self.loaded
        towers = both_towers(self._trained_shardings, loaded.trained, loaded.second)
        return merge(towers, self._base)

    def passages(self, params: Params | Adapted) -> PassageEncoder:
        """The tower of chunks; passages are cut at `config.data.max_chunk_tokens`."""
        data, config, loaded = self.config.data, self.config.encoder, self.loaded
        most = min(data.max_chunk_tokens, loaded.encoder.max_positions)
        how = most, config, data.passage_separator
        return PassageEncoder(self.mesh, params, self.shardings, loaded, *how)

    def export(self, which: str, out: Path) -> None:
        """Writes both towers of a checkpoint, their adapters and the model card."""
        check_is_free(out)
        params, step = self.trained(which)
        threshold = stop_threshold(self, f"{which}-{step}", params)
        with whole_folder(out) as building:
            form = row_form(self.loaded.encoder, self.config)
            for name, number in TOWERS.items():
                write_tower(self.loaded, name, form, params, building / name)
                if isinstance(params, Adapted):
                    adapters = on_host(params.adapters, number)
                    folder, sizes = building / f"{ADAPTER}-{name}", self.config.encoder.lora
                    pretrained.write_adapters(folder, self.loaded.table, sizes, adapters)
            about = retriever_config(self, params, building, threshold)
            text = card(self, about, which, step)
            for folder in (building, *building.iterdir()):
                (folder / CARD).write_text(text, encoding="utf-8")
            about.write(building)

    def backend(self, checkpoint: str) -> retriever.Backend:
        """The towers of a checkpoint as a retriever of this process."""
        params, step = self.trained(which := self.chosen(checkpoint))
        threshold = stop_threshold(self, f"{which}-{step}", params)
        # There are no files yet: the weights are those of the checkpoint.
        config = retriever_config(self, params, self.workdir / "not exported", threshold)
        form, encoder = row_form(self.loaded.encoder, self.config), self.loaded.encoder
        both = mesh_towers(self.mesh, self.shardings, [encoder] * 2, params, form)
        towers = Towers(self.loaded.tokenizer, form, *both)
        return retriever.Backend(config, towers, lambda: self.passages(params))

    @property
    def _trained_shardings(self) -> Params:
        adapted = isinstance(self.shardings, Adapted)
        return self.shardings.adapters if adapted else self.shardings

    @functools.cached_property
    def _base(self) -> Params | None:
        """The frozen base on the mesh, placed once and shared by all adapters; None without one."""
        if not isinstance(self.shardings, Adapted):
            return None
        return place(self.loaded.stored, self.shardings.base)


def weights_digest(params: Params | Adapted) -> str:
    return encoder_key(params, {})[:16]


# ---------------------------------------------------------------- its towers as files


TOWERS = {"state": STATE, "chunk": CHUNK}  # name → number on axis 0 of the parameters


def row_form(encoder: TextEncoder, config: QRagConfig) -> RowForm:
    """How the rows of both towers are composed, and how long they may be."""
    data, chunks = config.data, config.env.max_steps - 1
    parts = data.max_question_tokens, data.max_chunk_tokens_in_state
    longest = state_width(len(encoder.state_opening), *parts, chunks)
    return RowForm(
        encoder.state_opening,
        encoder.chunk_opening,
        encoder.sep_id,
        *parts,
        state_tokens=min(longest, encoder.max_positions),
        chunk_tokens=min(data.max_chunk_tokens, encoder.max_positions),
        max_chunks=chunks,
    )


def write_tower(
    loaded: pretrained.LoadedEncoder, name: str, form: RowForm, params: Params | Adapted, out: Path
) -> None:
    """Writes one of `TOWERS` as a folder that `SentenceTransformer(out)` reads; see `one_tower`."""
    encoder = loaded.encoder
    opening, most = (getattr(form, f"{name}_{part}") for part in ("opening", "tokens"))
    out.mkdir()
    plain = name == "chunk"  # a text is one part, not parts joined by the separator
    sentence_transformers.write_tokenizer(
        out, loaded.tokenizer, opening, max_tokens=most, plain=plain
    )
    outside, pooler = scale_outside(encoder), not loaded.trunk.config.PRE_NORM
    how: Any = {"scale": outside, "max_tokens": most, "pooler": pooler}
    sentence_transformers.write_modules(out, encoder, **how)
    config = loaded.model_config | {sentence_transformers.VECTOR_SCALE: outside}
    save_folder(loaded.table, one_tower(loaded, TOWERS[name], params), config, out, out)


def stop_threshold(run: SavedRun, label: str, params: Params | Adapted) -> float | None:
    """The threshold on Q at which the run's searches stop; None: there is none.

    It is the config's, else what `evaluate --log` found on the log of this checkpoint.
    """
    threshold = run.config.eval.stop_threshold
    if threshold > -math.inf:
        return threshold
    if not (path := run.workdir / "eval" / label / stopping.REPORT).exists():
        return None
    report = read_fields(path)
    if report["provenance"].get("weights") != weights_digest(params):
        print(f"{path} was tuned for other weights, so its threshold is left out")
        return None
    return report["threshold"]


def retriever_config(
    run: SavedRun, params: Params | Adapted, folder: Path, threshold: float | None
) -> RetrieverConfig:
    """What `retriever.json` says about towers exported to `folder`; see `stop_threshold`."""
    config, encoder, tokenizer = run.config, run.loaded.encoder, run.loaded.tokenizer
    form = row_form(encoder, config)
    state, chunk = (
        retriever_file.Tower(
            folder=name,
            prefix=getattr(config.encoder, f"{name}_prefix"),
            max_tokens=getattr(form, f"{name}_tokens"),
            width=encoder.width,
            scale=scale_outside(encoder),
            weights={
                file.name: sha256(file) for file in sorted((folder / name).glob("*.safetensors"))
            },
        )
        for name in TOWERS
    )
    return RetrieverConfig(
        format=retriever_file.FORMAT,
        library_version=qrag_jax.__version__,
        # A hub name, or the last part of a path; "": random weights.
        base_model=without_folders(first_encoder.origin(config.encoder.path, run.workdir)),
        state=state,
        chunk=chunk,
        digest=run.passages(params).digest().partition(TOWER_END)[0],
        title_separator=config.data.passage_separator,
        separator=str(tokenizer.backend.id_to_token(tokenizer.sep_id)),
        separator_id=tokenizer.sep_id,
        max_question_tokens=config.data.max_question_tokens,
        max_chunk_tokens_in_state=config.data.max_chunk_tokens_in_state,
        sort_by_index=config.env.sort_by_index,
        positions=retriever_file.Positions(
            kind=config.env.positions,
            theta=THETA,
            step=positions.STEP,
            span=positions.SPAN,
            parts=positions.PARTS,
            most_chunks=positions.MOST_CHUNKS,
        ),
        search=dataclasses.replace(config.beam, stop_threshold=threshold),
    )


# ---------------------------------------------------------------- the card

COLUMNS = ("fact_em", "fact_f1", "fact_precision", "fact_recall", "answer_found")


def card(run: SavedRun, about: RetrieverConfig, which: str, step: int) -> str:
    from huggingface_hub import ModelCard, ModelCardData

    name, config = run.workdir.resolve().name, run.config
    path, trained = run.workdir / "eval" / scoring.SUMMARY, run.workdir / "training.json"
    summary = read_fields(path) if path.exists() else {}  # if the run was not scored
    of_this = bool(summary) and (summary["checkpoint"], summary["step"]) == (which, step)
    data = ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "feature-extraction", "multi-step-retrieval", "qrag_jax"],
        model_name=name if of_this else None,
        eval_results=_results(config, summary) if of_this else None,
    )
    sources = ", ".join(source for source, weight in config.data.sources.items() if weight)
    folder = without_folders(config.data.path)
    written = ModelCard.from_template(
        data,
        template_path=str(TEMPLATES / "towers.md"),
        name=name,
        about=about,
        encoder=run.loaded.encoder,
        lora=run.config.encoder.lora,
        separator=json.dumps(about.separator),
        titled=json.dumps(about.title_separator),
        data=f"{sources} from `{folder}`" if folder else sources,
        which=which,
        step=step,
        steps=config.train.steps,
        seconds=json.loads(trained.read_text("utf-8"))["seconds"] if trained.exists() else None,
        scores=facts.table(dict(summary)) if summary else "",
        of_this=of_this,
        fields=json.dumps(without_folders(run.raw), indent=1, default=str),
    )
    return str(written)


def _results(config: QRagConfig, summary: Mapping[str, Any]) -> list[Any]:
    """The scores in the form of model hubs."""
    from huggingface_hub import EvalResult

    data = config.dev_data
    scores, questions = summary["scores"]["trained"], summary["samples"]
    asked = f"{summary.get('mode', facts.FULL_BUDGET)}, {questions:d} questions"
    sources = [source for source, weight in data.sources.items() if weight]
    path = f" ({without_folders(data.path)})" if data.path else ""
    at_k = (column for column in scores if column.startswith("recall@"))
    return [
        EvalResult(
            task_type="information-retrieval",
            task_name="Retrieval in several steps",
            dataset_type="+".join(sources),
            dataset_name=" + ".join(sources) + path,
            dataset_split="dev",
            dataset_args={"questions": questions},
            metric_type=column,
            metric_name=f"{column}, {asked}",
            metric_value=round(scores[column]["mean"], 4),
            metric_args={name: round(scores[column][name], 4) for name in ("low", "high")}
            | {"interval": "bootstrap, 95 %"},
        )
        for column in (*COLUMNS, *at_k)
        if column in scores
    ]
