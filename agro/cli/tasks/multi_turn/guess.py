"""The environment. It answers each guess and returns the reward."""

from agro.rollout.envs import Turn
from agro.types import Prompt


class Guess:
    """Find a digit: the answer to a guess is < if it was too high, and > if it was too low."""

    name = "guess"
    stop = tuple("0123456789")  # a turn ends with its first digit
    maximum = 1.0  # the reward with which an episode passes in `agro eval`

    def reset(self, prompt: Prompt) -> int:
        return int(prompt.columns["secret"])  # the state, which `step` receives

    def step(self, state: int, text: str) -> Turn:
        if not text.isdecimal():
            return Turn(done=True, reward=0.0)
        if int(text) == state:
            return Turn(done=True, reward=1.0)
        return Turn("<" if int(text) > state else ">", reward=0.0)
