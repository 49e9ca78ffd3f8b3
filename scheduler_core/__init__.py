"""The light core of tailcast: length distributions, policies, the scheduler state machine and the simulator.

Needs numpy alone. Start with `scheduler.Scheduler`, `policies`, `lengths.LogT` and `simulator`.
"""
