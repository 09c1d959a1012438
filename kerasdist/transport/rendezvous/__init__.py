"""Workers find each other: listening, dialing, and who belongs to the job."""
