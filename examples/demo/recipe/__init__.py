"""The recipe of the demo's model: `python -m examples.demo.recipe.build` makes it from nothing."""
