CREATE TABLE samples (
  id INTEGER PRIMARY KEY,
  prompt_id TEXT NOT NULL,
  episode TEXT,
  state INTEGER NOT NULL,
  role TEXT NOT NULL,
  source TEXT NOT NULL,
  version INTEGER NOT NULL,
  run TEXT,
  step INTEGER,
  redone INTEGER NOT NULL DEFAULT 0,
  knows_behavior INTEGER NOT NULL,
  knows_tokens INTEGER NOT NULL,
  knows_kept INTEGER NOT NULL,
  file TEXT, record INTEGER, part TEXT,
  reward,
  prompt TEXT, messages TEXT, response TEXT NOT NULL,
  tokenizer TEXT, sampling TEXT, meta TEXT NOT NULL,
  tokens BLOB, action BLOB, learn BLOB, behavior_logp BLOB,
  context_tokens BLOB, token_reward BLOB, versions BLOB, kept BLOB, kept_count BLOB,
  checksum INTEGER NOT NULL,
  CHECK ((prompt IS NULL) <> (messages IS NULL))
);
CREATE INDEX samples_draw ON samples (prompt_id, redone, reward, episode, state, role, source, version, run);
CREATE INDEX samples_state ON samples (state);
CREATE INDEX samples_run ON samples (run, version) WHERE run IS NOT NULL;
CREATE UNIQUE INDEX samples_origin ON samples (file, record, part) WHERE file IS NOT NULL;
CREATE TABLE pairs (
  winner INTEGER NOT NULL REFERENCES samples (id),
  loser INTEGER NOT NULL REFERENCES samples (id),
  votes_winner REAL,
  votes_loser REAL,
  checksum INTEGER NOT NULL
);
CREATE INDEX pairs_winner ON pairs (winner);
CREATE TABLE changes (number INTEGER PRIMARY KEY, prompt_id TEXT NOT NULL);
CREATE TABLE draws (
  run TEXT NOT NULL, step INTEGER NOT NULL, sample INTEGER NOT NULL REFERENCES samples (id),
  checksum INTEGER NOT NULL
);
CREATE INDEX draws_run ON draws (run, step);
CREATE INDEX draws_sample ON draws (sample);
CREATE TABLE group_uses (
  run TEXT NOT NULL, prompt_id TEXT NOT NULL, uses INTEGER NOT NULL, last INTEGER NOT NULL,
  checksum INTEGER NOT NULL,
  PRIMARY KEY (run, prompt_id)
);
CREATE TABLE commits (
  run TEXT NOT NULL, step INTEGER NOT NULL, digest TEXT NOT NULL, cursor INTEGER NOT NULL,
  files TEXT NOT NULL, checksum INTEGER NOT NULL
);
CREATE INDEX commits_run ON commits (run);
CREATE TABLE reference_logp (
  sample INTEGER NOT NULL, key TEXT NOT NULL, run TEXT NOT NULL, step INTEGER NOT NULL, logp BLOB NOT NULL,
  checksum INTEGER NOT NULL
);
CREATE INDEX reference_logp_key ON reference_logp (key, sample);
CREATE INDEX reference_logp_run ON reference_logp (run, step);
CREATE TABLE requests (
  run TEXT NOT NULL, number INTEGER NOT NULL, collector TEXT NOT NULL, done INTEGER NOT NULL, step INTEGER,
  checksum INTEGER NOT NULL,
  PRIMARY KEY (run, number)
);
CREATE INDEX requests_open ON requests (run, step, done);
CREATE TABLE imports (
  file TEXT PRIMARY KEY, name TEXT NOT NULL, options TEXT NOT NULL, license TEXT, checksum INTEGER NOT NULL
);
CREATE TABLE identities (
  identity TEXT PRIMARY KEY, file TEXT NOT NULL, record INTEGER NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE orders (
  number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, used REAL NOT NULL, sample INTEGER NOT NULL,
  change INTEGER NOT NULL, version INTEGER NOT NULL
);
CREATE TABLE order_versions (
  number INTEGER, newest INTEGER, groups INTEGER NOT NULL,
  PRIMARY KEY (number, newest)
) WITHOUT ROWID;
CREATE TABLE leases (name TEXT PRIMARY KEY, ends REAL NOT NULL, seconds REAL NOT NULL);
