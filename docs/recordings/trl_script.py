from datasets import load_dataset
from reward import prefix
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    "out",
    num_generations=8,
    per_device_train_batch_size=64,
    max_completion_length=4,
    learning_rate=1e-3,
    max_steps=20,
    log_completions=True,
    logging_steps=10,
    report_to="none",
    bf16=False,
    use_cpu=True,
)
trainer = GRPOTrainer(
    "runs/start/model",
    reward_funcs=prefix,
    args=args,
    train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),
)
trainer.train()
trainer.save_model("out/model")
