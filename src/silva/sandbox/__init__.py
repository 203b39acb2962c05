"""Runs Python code that a model wrote, behind walls that expect hostility. See docs/sandbox.md.

    session ──code──> zygote (a warm interpreter inside the walls) ──fork──> the call
            <─bytes──

Not here: what the model reads of a result (tools), what it earns (rewards).
"""
