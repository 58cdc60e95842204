"""Logs of other programs and public data sets, as formats for `agro import`.

agro finds them by the entry point `agro.formats`, as it would find those of another package.
"""

from agro.logs.declared import formats_of

FORMATS = formats_of("agro_formats")
