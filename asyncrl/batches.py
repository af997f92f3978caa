"""From a plan to what each learner rank is sent: group ids and advantages, balanced by tokens. Metadata only."""
