"""The card of a model that a run leaves: README.md, made from the files of the run folder, so that it can be made again."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

from agro.adapters import base_of, is_adapter
from agro.config import Policy
from agro.report.rundata import Measured, RunData, Span, load_run

UNKNOWN = "not measured"
RUN_CONFIG = "run_config.json"  # config.json is the model's own


def write_cards(run_folder: Path) -> None:
    """README.md for those of RUN/model, RUN/adapter and RUN/best that are there; the report and the configuration go to RUN/model too."""
    run = load_run(run_folder)
    folders = [folder for name in ("model", "adapter", "best") if (folder := run_folder / name).is_dir()]
    for folder in folders:
        (folder / "README.md").write_text(card(run, folder), encoding="utf-8")
    for name, copy in (("config.json", RUN_CONFIG), ("report.html", "report.html")):
        if run_folder / "model" in folders and (run_folder / name).exists():
            shutil.copyfile(run_folder / name, run_folder / "model" / copy)


def card(run: RunData, folder: Path) -> str:
    """The card of the model in `folder`."""
    kind = "adapter" if is_adapter(str(folder)) else "model"
    best = _best(folder)
    parts = [
        _front(run, kind),
        f"# {run.folder.resolve().name}",
        _lead(run, kind, best),
        "## Training\n\n" + _training(run),
        "## Results\n\n" + _results(run, best),
        "## Use\n\n" + _use(run, kind),
        "## Reproduce\n\n" + _reproduce(run),
    ]
    return "\n\n".join(parts) + "\n"


def _front(run: RunData, kind: str) -> str:
    base = _hub_name(_base(run))
    lines = ["---"]
    lines += [f"base_model: {json.dumps(base)}"] if base else []
    lines += [
        f"library_name: {'peft' if kind == 'adapter' else 'transformers'}",
        "pipeline_tag: text-generation",
    ]
    return "\n".join([*lines, "tags:", "- agro", "- reinforcement-learning", "---"])


def _base(run: RunData) -> str | None:
    """Folder or hub name of the model that the run began with; None: random weights."""
    model = run.config.policy.model
    return base_of(model) if model is not None and is_adapter(model) else model


def _hub_name(model: str | None) -> str | None:
    """The name, where it is one of the hub's and not a folder of some machine."""
    if (
        model is None
        or Path(model).expanduser().exists()
        or model.startswith((".", "~", "/"))
        or model.count("/") > 1
    ):
        return None
    return model


def _named(model: str) -> str:
    return f"`{_hub_name(model) or Path(model).name}`"


def _lead(run: RunData, kind: str, best: dict[str, Any] | None) -> str:
    base, steps = _base(run), run.spans[-1].ends
    asked = sum(run.config.phase(name).train.steps for name in run.config.phase_names)
    of = "random weights" if base is None else _named(base)
    said = f"An adapter (LoRA) of {of}" if kind == "adapter" else f"A language model that began as {of}"
    said += f", trained with [agro](https://arxiv.org/abs/2503.19612) for {steps} of {asked} steps."
    if best is not None:
        said += (
            f" These are the weights of step {best['step']}, which had the highest held-out reward of the run; "
            "the highest of several measurements is flattered by chance."
        )
    return said


def _training(run: RunData) -> str:
    c = run.config
    rows = {"objective": "; ".join(dict.fromkeys(_objective(run, span) for span in run.spans))}
    rows |= {
        "reference": "; ".join(
            dict.fromkeys(_reference(run.config.phase(span.name).policy) for span in run.spans)
        ),
        "prompts": _file(c.data.prompts),
        "held-out prompts": _file(c.data.eval_prompts),
        "store": _file(c.data.store) if c.data.store else "the run's own",
        "reward": re.sub(r"\S*/", "", c.reward.title)
        if c.data.prompts or c.data.eval_prompts
        else "that of the store",
        "tokens trained on": _count(run.total("tokens")),
        "tokens sampled": _count(run.total("sampled_tokens")),
        "seed": str(c.train.seed),
        "versions": ", ".join(
            f"{name} {version}" for name, version in run.values.get("versions", {}).items()
        ),
    }
    if c.policy.lora is not None:
        rows["adapter"] = (
            f"rank {c.policy.lora.rank}" if c.policy.lora.start is None else "went on from another"
        )
    return "\n".join(f"- {name}: {value}" for name, value in rows.items())


def _reference(policy: Policy) -> str:
    return policy.reference + (f" ({_named(policy.reference_model)})" if policy.reference_model else "")


def _objective(run: RunData, span: Span) -> str:
    config = run.config.phase(span.name)
    options = ", ".join(f"{name} = {value}" for name, value in config.objective.options.items())
    share = (
        f"{config.data.replay:.0%} of the groups from the store" if config.data.replay else "fresh samples"
    )
    return f"{config.objective.name}{f' ({options})' if options else ''}, {share}, steps {span.begins + 1} to {span.ends}"


def _results(run: RunData, best: dict[str, Any] | None) -> str:
    last = run.spans[-1].ends
    rows = [
        ("held-out reward before", _reward(run, run.heldout(0, 0))),
        (f"held-out reward after {last} steps", _reward(run, run.heldout(last, last))),
        ("KL to the reference then, nats a response", _kl(run, last)),
    ]
    if best is not None:
        se, n = best.get("eval_reward_se"), best.get("eval_n")
        rows.append((f"held-out reward at step {best['step']}", _figure(best["eval_reward"], se, n)))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"| | |\n|---|---|\n{table}\n\n± is one standard error over prompts; n counts responses."


def _reward(run: RunData, found: Measured | None) -> str:
    if found is None:
        return UNKNOWN
    n = next(row.get("eval_n") for row in run.rows if row["step"] == found.step)
    return _figure(found.value, found.se, n)


def _figure(value: float, se: float | None, n: int | None) -> str:
    known = se is not None and math.isfinite(se)
    return f"{value:.4f} ± {f'{se:.4f}' if known else 'unknown'} (n = {'unknown' if n is None else n})"


def _kl(run: RunData, step: int) -> str:
    value = next((row.get("eval_kl_ref") for row in run.rows if row["step"] == step), None)
    return UNKNOWN if value is None else f"{value:.3f}, on the held-out prompts"


def _use(run: RunData, kind: str) -> str:
    chat, load = run.config.policy.chat, "AutoModelForCausalLM"
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if kind == "adapter":
        load = "AutoPeftModelForCausalLM"
        lines = ["from peft import AutoPeftModelForCausalLM", "from transformers import AutoTokenizer"]
    lines += [
        f'model = {load}.from_pretrained("FOLDER_OR_NAME")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_NAME")',
    ]
    if chat.wrap or chat.system is not None or chat.options:
        options = "".join(f", {name}={value!r}" for name, value in chat.options.items())
        system = [{"role": "system", "content": chat.system}] if chat.system is not None else []
        messages = [*system, {"role": "user", "content": "…"}]
        lines += [
            f"messages = {json.dumps(messages, ensure_ascii=False)}",
            f"ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True{options})",
        ]
    return "```python\n" + "\n".join(lines) + "\n```"


def _reproduce(run: RunData) -> str:
    return (
        f"```\nagro train {RUN_CONFIG} --out runs/again\n```\n\n"
        f"`{RUN_CONFIG}` and `report.html` lie with the run's final model. The first names model and data by the paths that they had."
    )


def _best(folder: Path) -> dict[str, Any] | None:
    path = folder / "best.json"
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def _file(path: str | None) -> str:
    return "none" if path is None else f"`{Path(path).name}`"


def _count(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"
