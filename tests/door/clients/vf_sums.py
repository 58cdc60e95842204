"""Two sums as a taskset of verifiers."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class SumsTaskset(vf.Taskset[SumsTask]):
    def load(self):
        asked = {"1 + 1?": "two", "2 + 2?": "four"}
        return [SumsTask(SumsData(prompt=key, answer=value)) for key, value in asked.items()]
