"""One page of where descent goes: KL to the optimum against updates, on the policy's own samples and on
others'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agro.proof.claims import CLAIMS
from agro.proof.measuring import INSTANCES, described
from agro.proof.passport import Proof


def draw(subjects: Mapping[str, Proof], path: Path) -> None:
    """A PNG or SVG, by the ending of `path`: median and quartiles over the instances."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import colormaps, pyplot

    panels = {
        "policy": "its own samples",
        "reference": "samples of the reference",
        "uniform": "samples of a uniform policy",
    }
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 4.2), sharey=True, layout="constrained"
    )
    for i, (name, measured) in enumerate(subjects.items()):
        for (j, source), went in measured.paths.items():
            quartiles = went.distance.new_tensor([0.25, 0.5, 0.75])
            low, middle, high = went.distance.clamp(min=1e-17).quantile(quartiles, 1)
            options = described(CLAIMS[name][j])
            label = f"{name} ({options})" if options else name
            style = ("-", "--", ":")[0 if j == 0 else 1 + (j - 1) % 2]
            axis = axes[list(panels).index(source)]
            color = colormaps["tab20"](2 * i % 20 + i // 10)  # the ten strong ones first
            axis.plot(went.updates + 1, middle, style, color=color, label=label)
            axis.fill_between(went.updates + 1, low, high, color=color, alpha=0.15, linewidth=0)
    for axis, title in zip(axes, panels.values()):
        axis.set(title=title, xlabel="updates", xscale="log", yscale="log")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"KL(π ‖ π*), nats\nmedian and quartiles of {INSTANCES.prompts} problems")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
