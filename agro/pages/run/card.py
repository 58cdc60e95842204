"""The model card of a run, README.md, and the upload of RUN/model to the Hugging Face hub.

A card is made from the files of the run folder, so it can be rewritten at any time. The hub
token comes from `hf auth login` or HF_TOKEN, never from a configuration.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub

from agro.config import TrainConfig
from agro.errors import Refused
from agro.io.numbers import count, fixed, percent, with_error
from agro.io.terminal import cut, visible
from agro.models.adapters import base_of, is_adapter
from agro.pages.run.verdict import Verdict
from agro.runs.problems import problems
from agro.runs.rundata import (
    FOLLOWED,
    TOKENS,
    Measurement,
    RunData,
    data_text,
    load_run,
    options_text,
)
from agro.runs.side_by_side import SideBySide
from agro.store import Store
from agro.store.location import READ_SECONDS, exists, located

UNKNOWN = "not measured"
LONGEST = 240  # characters shown of a prompt or response
TEMPLATE = Path(__file__).parent / "templates" / "card.md"
RUN_CONFIG = "run_config.json"  # config.json belongs to the model


def write_cards(run_folder: Path) -> None:
    """Write README.md to those of RUN/model, RUN/adapter and RUN/best that exist.

    RUN/model also gets copies of the report and the run's configuration.
    """
    run = load_run(run_folder)
    folders = [run_folder / name for name in ("model", "adapter", "best")]
    folders = [folder for folder in folders if folder.is_dir()]
    for folder in folders:
        card(run, folder).save(folder / "README.md")
    for name, copy in (("config.json", RUN_CONFIG), ("report.html", "report.html")):
        if run_folder / "model" in folders and (run_folder / name).exists():
            shutil.copyfile(run_folder / name, run_folder / "model" / copy)


def card(run: RunData, folder: Path) -> huggingface_hub.ModelCard:
    """Make the card of the model in `folder`."""
    adapter = is_adapter(str(folder))
    best = run.best_model if (folder / "best.json").exists() else None
    base = run.config.policy.model  # None: random weights
    if base is not None and is_adapter(base):
        base = base_of(base)
    data = huggingface_hub.ModelCardData(
        base_model=_hub_name(base),
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["agro", "reinforcement-learning"],
    )
    chat, messages, chat_options = run.config.policy.chat, [], ""
    if chat.wrap or chat.system is not None or chat.options:  # else the run used no chat template
        messages = [{"role": "user", "content": "…"}]
        if chat.system is not None:
            messages.insert(0, {"role": "system", "content": chat.system})
        chat_options = "".join(f", {name}={value!r}" for name, value in chat.options.items())
    model_card: huggingface_hub.ModelCard = huggingface_hub.ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        run=run,
        name=literal(run.name),
        run_config=RUN_CONFIG,
        adapter=adapter,
        base="random weights" if base is None else _named(base),
        best=best,
        chosen_by="" if best is None else f"highest {FOLLOWED[best.metric]}",
        problems=problems(run),
        training=_training(run),
        results=_results(run, best),
        verdict=Verdict.of(run).sentence,
        shown=SideBySide.of(run.folder, run.config),
        text=lambda text: literal(cut(text, LONGEST)),
        messages=json.dumps(messages, ensure_ascii=False) if messages else "",
        chat_options=chat_options,
    )
    return model_card


def _hub_name(model: str | None) -> str | None:
    """Return a model's name on the hub; None for a local folder."""
    if model is None or model.startswith((".", "~", "/")) or model.count("/") > 1:
        return None
    return None if Path(model).expanduser().exists() else model


def _named(model: str) -> str:
    return literal(_hub_name(model) or Path(model).name)


def _training(run: RunData) -> dict[str, str]:
    """List the main facts about the training. File names appear without their paths, which are private."""
    c = run.config
    objectives, references = [], []
    for span in run.spans:
        phase = run.config_of(span)
        options, policy = options_text(phase), phase.policy
        named = literal(phase.objective.name + (f" ({options})" if options else ""))
        objectives.append(f"{named}, {data_text(phase)}, steps {span.begins + 1} to {span.ends}")
        model = f" ({_named(policy.reference_model)})" if policy.reference_model else ""
        references.append(f"{policy.reference}{model}")
    held_out = _files(c.data.paths("eval_prompts"))
    if c.data.hold_out and c.data.eval_prompts is None:
        held_out = f"{percent(c.data.hold_out, 1)} of the prompts, never trained on"
    has_reward = c.data.prompts or c.data.eval_prompts
    reward = literal(re.sub(r"\S*/", "", c.reward.title)) if has_reward else "from the store"
    versions = run.values.get("versions", {})
    facts = {
        "objective": "; ".join(dict.fromkeys(objectives)),
        "reference": "; ".join(dict.fromkeys(references)),
        "prompts": _files(c.data.paths("prompts")),
        "held-out prompts": held_out,
        "store": _files([c.data.store]) if c.data.store else "the run's own",
        "reward": reward,
        "weights": run.averages and f"an exponential moving average ({run.averages})",
        **{title: run.counted(name) or UNKNOWN for title, name in TOKENS.items()},
        "seed": str(c.train.seed),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "imported data": _imported(run),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _imported(run: RunData) -> str:
    """Describe the imported samples that the run trained on: source, file and license."""
    path = located(run.config.data.store, run.folder)
    if not exists(path):
        return ""
    try:
        with Store.open(path, read_only=True, timeout=READ_SECONDS) as store:
            origins = store.imports.provenance(str(run.values.get("run")))
    except Refused as error:
        return f"unknown: {literal(str(error))}"
    return "; ".join(
        f"{literal(o.source)}: {count(o.samples)} samples of {literal(o.file)} (SHA-256 {o.sha256[:12]}…), "
        f"license: {literal(o.license) if o.license else 'unknown'}"
        for o in origins
    )


def _results(run: RunData, best: Measurement | None) -> dict[str, str]:
    """List the held-out reward and the followed metric, before, after, and at the best model; and the KL."""
    end, rows = run.steps, {row["step"]: row for row in run.rows}
    measured: dict[str, Measurement | None] = {}
    for metric in dict.fromkeys(("eval_reward", run.followed or "eval_reward")):
        for step, when in ((0, "before"), (end, f"after {end} steps")):
            present = rows.get(step, {}).get(metric) is not None
            measured[f"{FOLLOWED[metric]} {when}"] = Measurement.of(metric, rows[step]) if present else None
    if best is not None:
        measured[f"{FOLLOWED[best.metric]} at step {best.step}"] = best
    results = {}
    for title, x in measured.items():
        results[title] = UNKNOWN if x is None else with_error(x.value, x.se, 4)
        if x is not None and x.metric == "eval_reward":
            results[title] += f" (n = {'unknown' if x.n is None else x.n})"
    kl = rows[end].get("eval_kl_ref")
    at_end = UNKNOWN if kl is None else f"{fixed(kl)}, on the held-out prompts"
    return {**results, "KL to the reference at the end, nats per response": at_end}


def literal(text: str) -> str:
    """Format untrusted text as Markdown code on one line."""
    shown = " ".join(visible(text).split())
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    padding = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{padding}{shown}{padding}{fence}" if shown else "(empty)"


def _files(paths: Sequence[str]) -> str:
    return ", ".join(literal(Path(path).name) for path in paths) or "none"


def push(folder: Path, train: TrainConfig) -> str | None:
    """Upload a folder to the repository `train.push`, if there is one, and return its address.

    The repository is created if needed. Raises `Refused` if the hub can't be reached or rejects the upload.
    """
    if train.push is None:
        return None
    api = huggingface_hub.HfApi()
    message = "Upload a model trained with agro"
    try:
        url = api.create_repo(train.push, private=train.push_private, exist_ok=True)
        api.upload_folder(repo_id=train.push, folder_path=folder, commit_message=message)
    except Exception as error:  # noqa: BLE001  # from the network or any of huggingface_hub's libraries
        private = " --private" if train.push_private else ""
        raise Refused(
            f"train.push: {folder} was not uploaded to {train.push}: {str(error).strip():.500}\n"
            f"The run is complete and saved. Try again with: hf upload {train.push} {folder} .{private}"
        ) from None
    return str(url)
