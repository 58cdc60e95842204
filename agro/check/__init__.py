"""What is in a store, before training: numbers, verdicts in words, and a page (`agro check`)."""

from agro.check.report import Report, check_store
from agro.check.survey import Survey, survey
from agro.check.verdicts import Verdict

__all__ = ["Report", "Survey", "Verdict", "check_store", "survey"]
