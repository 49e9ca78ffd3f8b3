"""Parts of benchmarks/vllm/serving.py: engine process, plan of the runs, client, results."""
