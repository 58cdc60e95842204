"""mini-swe-agent: two commands in a shell, with a turn without a command between them."""

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

model = LitellmModel(model_name="openai/m", cost_tracking="ignore_errors")
templates = {"system_template": "be brief", "instance_template": "{{task}}"}
print(DefaultAgent(model, LocalEnvironment(), **templates, step_limit=5).run("say hi")["submission"])
