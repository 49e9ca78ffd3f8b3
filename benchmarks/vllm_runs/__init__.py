"""Parts of benchmarks/vllm_cpu.py: engine process, plan of the runs, client, results."""
