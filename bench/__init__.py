"""The benchmarks: their harness, the ledger of what a step costs on a GPU, the survey of a machine."""
