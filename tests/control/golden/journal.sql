PRAGMA foreign_keys=OFF;
BEGIN TRANSACTION;
CREATE TABLE meta (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    schema INTEGER NOT NULL,
    boot INTEGER NOT NULL,
    probed INTEGER NOT NULL
) STRICT;
INSERT INTO meta VALUES(1,1,1,0);
CREATE TABLE channel (
    name TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    committed_version INTEGER,
    committed_epoch INTEGER,
    manifest TEXT,
    digest_table TEXT,
    CHECK (committed_epoch IS NULL OR committed_epoch <= epoch)
) STRICT;
INSERT INTO channel VALUES('policy',1,1,1,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb');
CREATE TABLE reply (
    request TEXT PRIMARY KEY,
    channel TEXT NOT NULL,
    answer BLOB NOT NULL,
    written_at REAL NOT NULL
) STRICT;
INSERT INTO reply VALUES('r1','policy',X'88a474797065a9526f756e64446f6e65a76368616e6e656ca6706f6c696379a565706f636801a776657273696f6e01a76f7574636f6d65a9636f6d6d6974746564a6726561736f6ea0a7656e67696e65739189a6656e67696e65a26530a76f7574636f6d65a9636f6d6d6974746564a97472616e73706f7274a56c6f63616ca776657273696f6e01a5627974657305a76275636b65747301a77365636f6e647381a57061757365cb3ff0000000000000ab76657269666965645f6279ab6c6976652d646967657374a6726561736f6ea0a77365636f6e647381a5746f74616ccb3ff0000000000000',1.0);
CREATE TABLE event (
    id INTEGER PRIMARY KEY,
    written_at REAL NOT NULL,
    boot INTEGER NOT NULL,
    channel TEXT NOT NULL,
    record TEXT NOT NULL
) STRICT;
INSERT INTO event VALUES(1,1.0,1,'policy','{"record":"EpochTaken","channel":"policy","epoch":1,"holder":"t","version":1,"redrive":false}');
INSERT INTO event VALUES(2,1.0,1,'policy','{"record":"Committed","channel":"policy","epoch":1,"version":1,"manifest":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","table":"bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb","request":"r1","engines":["e0"]}');
INSERT INTO event VALUES(3,1.0,1,'policy','{"record":"RoundClosed","request":"r1","done":{"type":"RoundDone","channel":"policy","epoch":1,"version":1,"outcome":"committed","reason":"","engines":[{"engine":"e0","outcome":"committed","transport":"local","version":1,"bytes":5,"buckets":1,"seconds":{"pause":1.0},"verified_by":"live-digest","reason":""}],"seconds":{"total":1.0}}}');
COMMIT;
