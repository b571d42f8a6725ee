-- Version 4: requests that could not be tied to the turn that they answer, and why. Whatever is deleted
-- is overwritten: the file is written anew once (database.py).
ALTER TABLE turns ADD COLUMN lost TEXT;
CREATE INDEX turns_lost ON turns (lost) WHERE lost IS NOT NULL;
