"""Methods of single papers: objectives with claims, sources around a source (`agro.train.around`), recipes.

They import from agro only what `docs/api` documents, and agro imports none of them: it finds them by their
entry points, as it finds those of any package.
"""
