"""Systems of the literature that are more than an objective: sources around a source (`agro.train.around`).

They import of agro what `docs/api` documents, and agro imports none of them: it finds them by their entry
points, as it does those of any package.
"""
