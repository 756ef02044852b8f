BEGIN TRANSACTION;
CREATE TABLE channel (
    name TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    committed_version INTEGER,
    committed_epoch INTEGER,
    manifest TEXT,
    digest_table TEXT,
    CHECK (committed_epoch IS NULL OR committed_epoch <= epoch)
) STRICT;
INSERT INTO "channel" VALUES('policy',50,3,2,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa');
INSERT INTO "channel" VALUES('other',1,NULL,NULL,NULL,NULL);
INSERT INTO "channel" VALUES('reward',1,NULL,NULL,NULL,NULL);
CREATE TABLE event (
    id INTEGER PRIMARY KEY,
    written_at REAL NOT NULL,
    boot INTEGER NOT NULL,
    channel TEXT NOT NULL,
    record TEXT NOT NULL
) STRICT;
INSERT INTO "event" VALUES(1,1.0,1,'policy','{"record":"EpochTaken","channel":"policy","epoch":1,"holder":"t","version":1,"redrive":false,"rollback":false}');
INSERT INTO "event" VALUES(2,1.0,1,'policy','{"record":"Committed","channel":"policy","epoch":1,"version":1,"manifest":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","table":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","request":"p","announced":1,"question":"ab","engines":["e0"],"rollback":false}');
INSERT INTO "event" VALUES(3,1.0,1,'policy','{"record":"RoundClosed","request":"p","done":{"type":"RoundDone","channel":"policy","epoch":1,"version":1,"outcome":"committed","reason":"","engines":[],"seconds":{"total":1.0}},"question":"ab"}');
INSERT INTO "event" VALUES(4,1.0,1,'other','{"record":"EpochTaken","channel":"other","epoch":1,"holder":"t","version":1,"redrive":false,"rollback":false}');
INSERT INTO "event" VALUES(5,1.0,1,'policy','{"record":"EpochTaken","channel":"policy","epoch":2,"holder":"t","version":1,"redrive":false,"rollback":false}');
INSERT INTO "event" VALUES(6,1.0,1,'policy','{"record":"Committed","channel":"policy","epoch":2,"version":3,"manifest":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","table":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","request":"p","announced":2,"question":"ab","engines":["e0"],"rollback":false}');
INSERT INTO "event" VALUES(7,1.0,1,'policy','{"record":"EpochRaised","channel":"policy","epoch":9,"engine":"e0"}');
INSERT INTO "event" VALUES(8,1.0,1,'reward','{"record":"EpochTaken","channel":"reward","epoch":1,"holder":"t","version":1,"redrive":false,"rollback":false}');
INSERT INTO "event" VALUES(9,1.0,1,'gone','{"record":"EpochTaken","channel":"gone","epoch":1,"holder":"t","version":1,"redrive":false,"rollback":false}');
INSERT INTO "event" VALUES(10,1.0,1,'gone','{"record":"ChannelForgotten","channel":"gone"}');
INSERT INTO "event" VALUES(11,1.0,1,'policy','{"record":"RoundClosed","request":"q","done":{"type":"RoundDone","channel":"policy","epoch":1,"version":1,"outcome":"committed","reason":"","engines":[],"seconds":{"total":1.0}},"question":"ab"}');
CREATE TABLE meta (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    schema INTEGER NOT NULL,
    boot INTEGER NOT NULL,
    probed INTEGER NOT NULL
) STRICT;
INSERT INTO "meta" VALUES(1,3,1,1);
CREATE TABLE past (
    id INTEGER PRIMARY KEY,
    channel TEXT NOT NULL,
    version INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    rollback INTEGER NOT NULL
) STRICT;
INSERT INTO "past" VALUES(1,'policy',1,1,0);
INSERT INTO "past" VALUES(2,'policy',3,2,0);
CREATE TABLE reply (
    request TEXT PRIMARY KEY,
    channel TEXT NOT NULL,
    answer BLOB NOT NULL,
    written_at REAL NOT NULL,
    question TEXT NOT NULL DEFAULT '',
    closed INTEGER NOT NULL DEFAULT 1
) STRICT;
INSERT INTO "reply" VALUES('p','policy',X'88A474797065A9526F756E64446F6E65A76368616E6E656CA6706F6C696379A565706F636802A776657273696F6E03A76F7574636F6D65A9636F6D6D6974746564A6726561736F6ED96177617320636F6D6D69747465643B2074686520636F6F7264696E61746F7220656E646564206265666F72652074686520726F756E64206469642C20616E6420686F772069747320656E67696E657320666172656420776173206E6F74206B657074A7656E67696E657390A77365636F6E647381A5746F74616CCB0000000000000000',1.0,'ab',0);
INSERT INTO "reply" VALUES('q','policy',X'88A474797065A9526F756E64446F6E65A76368616E6E656CA6706F6C696379A565706F636801A776657273696F6E01A76F7574636F6D65A9636F6D6D6974746564A6726561736F6EA0A7656E67696E657390A77365636F6E647381A5746F74616CCB3FF0000000000000',1.0,'ab',1);
CREATE INDEX past_of_channel ON past (channel, id);
CREATE INDEX event_of_channel ON event (channel, id);
COMMIT;
