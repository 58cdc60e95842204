"""What is in a store, before training: numbers, and verdicts in words (`agro check`)."""

from agro.pages.store.check_report import DataVerdict, Report, check_store, recommendation_lines
from agro.pages.store.check_survey import StoreSurvey, survey

__all__ = ["DataVerdict", "Report", "StoreSurvey", "check_store", "recommendation_lines", "survey"]
