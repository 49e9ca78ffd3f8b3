"""Parts of benchmarks/vllm_cpu.py: the engine's process, the plan of the runs, their results."""
