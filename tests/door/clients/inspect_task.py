"""Two questions as a task of Inspect's."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import exact


@task
def sums():
    return Task([Sample("2 + 2?", target="four"), Sample("1 + 1?", target="two")], scorer=exact())
