"""The only code that imports vLLM: entry points, scheduler, KV connector and the agent of one instance.

What runs where (vLLM 0.32): `scheduler`, `tracker`, `ledger` and the sending side of `load_feed` in EngineCore;
`connector` in EngineCore and in the worker; `agent`, `dispatcher`, `legs`, `predictor_process` and the receiving side
of `load_feed` in the API server. Importing this package imports nothing.
"""
