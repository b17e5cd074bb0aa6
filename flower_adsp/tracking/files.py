"""The names of the files in a run's folder."""

HISTORY = "history.jsonl"
SUMMARY = "summary.json"
MODEL = "model.safetensors"
HOST = "host.json"
CHECKPOINT = "checkpoint.safetensors"
CONFIG = "config.json"
REPORT = "report.html"
