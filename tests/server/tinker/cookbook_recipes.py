"""Runs recipes of tinker-cookbook one after the other, as `python -m` would (in .peers/cookbook).

Each line of the input is a recipe and its arguments as JSON; each line of the output is what became of one:
"" or the error. In one process, for the imports take longer than the recipes.
"""

import json
import os
import runpy
import sys
import traceback

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    recipe, *arguments = json.loads(line)
    sys.argv = [recipe, *arguments]
    error = ""
    try:
        runpy.run_module(f"tinker_cookbook.recipes.{recipe}", run_name="__main__")
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps(error), file=answers, flush=True)
