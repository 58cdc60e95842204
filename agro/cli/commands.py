"""The commands by name: where each is, what it does, an example, and its page of the guide.

It imports nothing of agro, so that `agro --help` needs no command's module.
"""

from collections.abc import Iterator
from typing import NamedTuple


class CommandEntry(NamedTuple):
    name: str
    home: str  # module:function in agro.cli
    page: str  # in docs/
    summary: str
    example: str  # of its arguments


# Of each command a line with name, home and page, then its summary, then the example.
TEXT = {
    "First steps": """
init explain:init guide/getting-started.md
    A folder to begin with: recipe, prompts, reward, and a README with the next commands.
    first --task digits
recipes explain:recipes guide/getting-started.md
    The recipes for `agro train NAME` and the tasks for `agro init`: what each is for, its time.
    fresh
doctor doctor:doctor guide/the-run.md
    Versions, device, threads, state of a run or store, and what is off, to paste into an issue.
    runs/first
""",
    "Train and sample": """
train runs:train guide/the-run.md
    One run: from a configuration to a model, metrics and a report.
    recipe.toml train.steps=100 --out runs/first
race runs:race guide/choosing.md
    Short runs of several methods and rates on one log or task; the best one trains on.
    policy.model=runs/first/model data.store=runs/first/store.db data.eval_prompts=held_out.jsonl
        reward.name=reward.py:prefix sampler.max_new=4 train.steps=24 --rate 3e-4 --rate 1e-3 --out runs/race
collect runs:collect guide/the-run.md
    Sample and score for a run that another process trains (source.kind = elsewhere).
    runs/async
ps runs:ps guide/hosts.md
    Who does what in a run: its processes, their hosts, weights and last signs of life.
    runs/async
sample run_models:sample guide/getting-started.md
    Sample responses into a store, without rewards; other ones each time, also with the same seed.
    --model runs/first/model --prompts prompts.jsonl --out more.db -n 4 --max-new 4
""",
    "Programs that call a model": """
serve serve_command:serve guide/agents.md
    A run's model behind OpenAI's and Anthropic's interfaces; --store keeps every answered call.
    runs/first --store calls.db
proxy serve_command:proxy guide/agents.md
    In front of a server with such an interface: what passes is stored, with log-probs it returns.
    --to http://127.0.0.1:8000/v1 --store calls.db
""",
    "Results": """
eval eval_command:eval_ guide/getting-started.md
    Mean reward, accuracy and pass@k with 95 % intervals; the best and the worst response.
    runs/first
off-policy off_policy_command:off_policy guide/reading-the-report.md
    A model's value by a log that it didn't write, with intervals, or why there is none.
    runs/first --log runs/first/store.db
rate eval_command:rate guide/reading-the-report.md
    A page on which a person rates blind pairs of start and result, until it is decided.
    runs/first
chat chat_command:chat guide/getting-started.md
    Talk to the result of a run, also blind beside its start, which makes judged pairs.
    runs/first --against start --temperature 0 < lines.txt
report runs:report guide/reading-the-report.md
    A run's figures as one self-contained page.
    runs/first
compare compare_command:compare guide/reading-the-report.md
    Is B better than A, on the same prompts? Runs, models, stores, harnesses' samples; curves too.
    runs/agro-0 runs/agro-1 runs/rloo-0 runs/rloo-1
""",
    "Data": """
import import_command:import_ guide/your-data.md
    Import logged responses into a store; reports what was recognized, imported and refused.
    log.jsonl.gz --store logs.db --map prompt=question --map response=output --map reward=score --map
        meta.user=user
formats explain:formats formats.md
    The formats of logs: what each holds and carries, and who writes it.
    trl-completions
check checking:check guide/your-data.md
    What is in a store or log, and the command that trains on it; exit 2 where nothing can.
    logs.db
show browse:show guide/the-run.md
    Browse a store: samples, or groups side by side.
    runs/first/store.db --groups --reward 0.5: --limit 1 --columns 3
score stores:score guide/your-reward.md
    Fill in or renew the rewards of a store.
    logs.db --reward reward.py:prefix
judge-check reward_fitting:judge_check guide/your-reward.md
    Compare a judge's scores with labels that are there: agreement and kappa.
    logs.db --reward reward.py:prefix --threshold 0.5
fit-reward reward_fitting:fit_reward guide/your-reward.md
    A reward model from judged pairs or rewards: its held-out accuracy, calibration, length bias.
    logs.db --model runs/first/model --out runs/judge --on groups --lr 1e-3
export stores:export guide/your-data.md
    Write a store as records that agro import takes, or the model of a run in 16 bits or as GGUF.
    runs/first/store.db samples.jsonl.gz
forget stores:forget guide/your-data.md
    Delete samples for good, with their judgments, and name the runs that trained on them.
    logs.db --meta user=alice --yes
store store_command:store guide/hosts.md
    Copy a store from a file to PostgreSQL, or back, with ids and checksums. Joins old stores.
    copy runs/first/store.db copied.db
recover stores:recover guide/the-run.md
    Copy all that is undamaged in a store into a new one, and report what is lost.
    damaged.db --out recovered.db
""",
    "Methods": """
objectives explain:objectives guide/choosing.md
    The objectives: what they need, how far they couple, their options and source.
    agro
prove explain:prove guide/choosing.md
    What is proved of objectives by enumeration; exit 1 where a claim is false.
    agro kl_pg --figure proof.png
""",
}


def _entries(text: str) -> Iterator[CommandEntry]:
    blocks: list[list[str]] = []
    for line in text.strip().splitlines():
        if line.startswith(" "):
            blocks[-1].append(line.strip())
        else:
            blocks.append([line])
    for head, summary, *example in blocks:
        name, home, page = head.split()
        yield CommandEntry(name, home, page, summary, " ".join(example))


GROUPS = {group: list(_entries(text)) for group, text in TEXT.items()}
COMMANDS = [entry for group in GROUPS.values() for entry in group]

USAGE = """Usage: agro COMMAND [OPTIONS] [ARGUMENTS]

  Reinforcement learning for language models from any generation: fresh,
  replayed, logged or taught.
"""
OPTIONS = """Options:
  --version             The version of agro-rl.
  --install-completion  Install completion for the current shell.
  --show-completion     Print the completion, to copy it or change it.
  --help                This text; agro COMMAND --help has the options of a
                        command, an example and its page of the guide.
"""
WIDTH = 80
INDENT = 14  # the longest name, two spaces on either side


def overview() -> str:
    """What `agro --help` prints."""
    parts = [USAGE]
    for title, entries in GROUPS.items():
        lines = [f"{title}:"]
        for entry in entries:
            lines += _wrapped(f"  {entry.name}".ljust(INDENT), entry.summary.replace("`", ""))
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, OPTIONS])


def _wrapped(line: str, text: str) -> list[str]:
    """The words of `text` after `line`, in lines shorter than WIDTH. (textwrap is slow to import.)"""
    lines = [line]
    for word in text.split():
        if len(lines[-1]) + len(word) >= WIDTH:
            lines.append(" " * INDENT)
        gap = "" if lines[-1].endswith("  ") else " "
        lines[-1] += gap + word
    return lines
