/* One channel, as control/protocol/PROTOCOL.md describes it, small enough to look at every course that it can take.
 *
 * A coordinator whose journal survives its crashes, two trainers that both want to publish, and engines that load a
 * version bucket by bucket. Messages are never consumed: once said, a message may arrive at any later time, any number
 * of times, or never. So loss, repetition, delay and reordering are all in it. Anything may crash at any step.
 *
 * FENCE=0     engines do not compare epochs
 * DURABLE=0   the coordinator says Commit before the version is on its disk
 * DIRTY=0     an engine agent forgets over its own crash that weights are half loaded
 * MONOTONE=0  the coordinator commits any version
 *
 * COMPARE=0   the coordinator commits whatever table an engine has proven
 * TABLE=0     an engine serves what it holds by the number of its version
 *
 * OPEN=1: the digest table follows. An engine may be given another one than the trainer's, and bytes that agree with it:
 * it has proven its version, until the trainer says its table, and then it is broken and may be sent everything again.
 *
 * WAVES=1: engines take turns in a round (`Policy.max_paused`). The version is durable after the first wave, and the
 * other engine serves the one before until it is told, under another epoch, to take it too.
 *
 * `make model` explores it without them, and then shows that each of these is found.
 */

#ifndef FENCE
#define FENCE 1
#endif
#ifndef DURABLE
#define DURABLE 1
#endif
#ifndef DIRTY
#define DIRTY 1
#endif
#ifndef MONOTONE
#define MONOTONE 1
#endif
#ifndef COMPARE
#define COMPARE 1
#endif
#ifndef TABLE
#define TABLE 1
#endif
#ifndef OPEN
#define OPEN 0          /* a table may follow that is not the trainer's */
#endif
#define OTHER 8         /* added to a version: other bits of that number */
#ifndef WAVES
#define WAVES 0         /* engines take turns: one stands still, and serves again, before the next one may */
#endif
#ifndef ENGINES
#define ENGINES 2
#endif
#ifndef EPOCHS
#define EPOCHS 3        /* grants and re-drives, before everybody has had enough */
#endif
#ifndef CRASHES
#define CRASHES 2
#endif
#ifndef AGENT_CRASHES
#define AGENT_CRASHES 1 /* of each agent, or launches of its server */
#endif

/* What was ever said: by epoch, for everybody to hear again and again. The version of an epoch is fixed when it is
 * granted; a re-drive is another epoch of the same version. */
bool granted[EPOCHS + 1];          /* the epoch belongs to somebody */
byte version_of[EPOCHS + 1];       /* what is published under it */
byte trainer_of[EPOCHS + 1];
bool transfer_said[EPOCHS + 1];
byte told[EPOCHS + 1];             /* whose turn it is: 1 the first engine's, 2 the second one's, 3 everybody's */
bool commit_said[EPOCHS + 1];
bool abort_said[EPOCHS + 1];

typedef Heard {
  bool verified[EPOCHS + 1];       /* by the table of the trainer */
  bool other[EPOCHS + 1]           /* by another one: `VERIFIED`, and `BROKEN` once the trainer's is known */
}
Heard from[ENGINES];               /* what each engine ever said: Verified(epoch) */

/* The coordinator: disk and memory. */
byte disk_epoch = 0, disk_committed = 0;
byte epoch = 0, committed = 0;
bool in_round = false, up = true;
bool rolling = false;              /* the version is durable, and some still wait for their turn */
byte crashes = 0;

/* The engines: what the servers hold, what the agents know. A version is loaded in two buckets. */
typedef Engine {
  byte first, second;              /* the buckets, by the version that is in each */
  bool paused;
  byte max_epoch;                  /* the agent's memory... */
  byte recorded;                   /* ... and what of it is in its record */
  byte served;                     /* the judge's memory: the newest version that this launch was told to serve */
  byte held;                       /* the version that the agent proved, 0: that of the launch */
  bool dirty;                      /* durable, unless DIRTY=0 */
  byte pausing;                    /* the epoch for which it comes to a stand, 0: none; its record says dirty already */
  byte loading                     /* the epoch whose bytes are under way, 0: none */
}
Engine engine[ENGINES];

byte highest_committed = 0;        /* the judge's memory: the version of the highest Commit that was ever said */

/* A token is made of both buckets, at any time that a server is not paused. */
#define SERVES_MIXED(e) (!engine[e].paused && engine[e].first != engine[e].second)

#define SERVES_OTHER(e) (!engine[e].paused && engine[e].second >= OTHER)

proctype Coordinator() {
  byte e, v;
  do
  /* Grant the next epoch, or take it for a re-drive: durable first. */
  :: atomic { up && epoch < EPOCHS && !in_round ->
       rolling = false;
       disk_epoch = epoch + 1;
       epoch = disk_epoch;
       if
       :: trainer_of[epoch] = 1
       :: trainer_of[epoch] = 2
       fi;
       if                                        /* the version that its trainer wants */
       :: version_of[epoch] = committed + 1
       :: epoch > 1 -> version_of[epoch] = 1                          /* it resumed from its first checkpoint */
       fi;
       if
       :: MONOTONE && version_of[epoch] <= committed -> skip          /* refused: the epoch is spent */
       :: else -> granted[epoch] = true; in_round = true
       fi }
  :: atomic { up && in_round && !transfer_said[epoch] ->
       if
       :: !WAVES -> told[epoch] = 3
       :: WAVES -> told[epoch] = 1
       :: WAVES -> told[epoch] = 2
       fi;
       transfer_said[epoch] = true }
  /* A re-drive: everything again under a new epoch. */
  :: atomic { up && in_round && transfer_said[epoch] && epoch < EPOCHS ->
       v = version_of[epoch];
       disk_epoch = epoch + 1;
       epoch = disk_epoch;
       version_of[epoch] = v; trainer_of[epoch] = trainer_of[epoch - 1]; granted[epoch] = true;
       told[epoch] = told[epoch - 1];
       transfer_said[epoch] = true }
  /* The next wave: the same version under a new epoch, to the other one; it serves the version before until then. */
  :: atomic { WAVES && up && rolling && commit_said[epoch] && epoch < EPOCHS ->
       v = version_of[epoch];
       disk_epoch = epoch + 1;
       epoch = disk_epoch;
       version_of[epoch] = v; trainer_of[epoch] = trainer_of[epoch - 1]; granted[epoch] = true;
       told[epoch] = 3 - told[epoch - 1];
       transfer_said[epoch] = true;
       rolling = false; in_round = true }
  /* Somebody proved this epoch's version: commit it. */
  :: atomic { up && in_round && transfer_said[epoch] &&
       (from[0].verified[epoch] || from[ENGINES - 1].verified[epoch] ||
        (!COMPARE && (from[0].other[epoch] || from[ENGINES - 1].other[epoch]))) ->
       assert(from[0].verified[epoch] || from[ENGINES - 1].verified[epoch]);
       if
       :: DURABLE -> disk_committed = version_of[epoch]
       :: !DURABLE -> commit_said[epoch] = true
       fi;
       rolling = WAVES && committed != version_of[epoch];
       committed = version_of[epoch];
       in_round = false }
  /* ... and only then say so, now or after any number of crashes. */
  :: atomic { up && !in_round && epoch > 0 && committed > 0 && version_of[epoch] == committed &&
       transfer_said[epoch] && !commit_said[epoch] && !abort_said[epoch] ->
       commit_said[epoch] = true }
  :: atomic { !DURABLE && up && disk_committed < committed -> disk_committed = committed }
  /* Give the round up. */
  :: atomic { up && in_round -> abort_said[epoch] = true; in_round = false }
  /* Crash, and a new life from the disk. Every boot takes an epoch. */
  :: atomic { up && crashes < CRASHES -> up = false; crashes++ }
  :: atomic { !up ->
       up = true; in_round = false; rolling = false; committed = disk_committed;
       if
       :: disk_epoch < EPOCHS ->
            disk_epoch++;
            version_of[disk_epoch] = disk_committed;   /* the boot's epoch speaks of what is committed */
            transfer_said[disk_epoch] = disk_committed > 0;
            told[disk_epoch] = 3;
            abort_said[disk_epoch] = disk_committed == 0
       :: else
       fi;
       epoch = disk_epoch }
  :: atomic { epoch == EPOCHS && !in_round && up -> break }
  od
}

/* Whoever hears a Commit for the first time checks what it means. */
inline judge_commit(e) {
  assert(!DURABLE || disk_committed >= version_of[e]);
  if
  :: version_of[e] > highest_committed -> highest_committed = version_of[e]
  :: else
  fi
}

proctype Agent(byte me) {
  byte e;
  byte agent_crashes = 0;
  do
  /* Any message of any epoch may arrive now. A lower epoch than the highest seen is refused by comparison. */
  :: atomic {
       select (e : 1 .. EPOCHS);
       if
       :: transfer_said[e] && granted[e] && (told[e] & (me + 1)) && (!FENCE || e > engine[me].max_epoch) && engine[me].held != version_of[e] ->
            if
            :: e > engine[me].max_epoch -> engine[me].max_epoch = e
            :: else
            fi;
            engine[me].recorded = engine[me].max_epoch;   /* written ahead, while it comes to a stand */
            engine[me].loading = 0;
            engine[me].pausing = e
       :: transfer_said[e] && engine[me].held == version_of[e] && version_of[e] > 0 && !engine[me].dirty &&
            !engine[me].loading && !engine[me].pausing && (!FENCE || e >= engine[me].max_epoch) ->
            engine[me].max_epoch = (e > engine[me].max_epoch -> e : engine[me].max_epoch);
            from[me].verified[e] = true          /* it has these very bits already */
       :: else -> skip
       fi;
       e = 0 }
  /* It stands still: paused, and durably dirty, before the first byte. */
  :: atomic { engine[me].pausing ->
       engine[me].paused = true;
       engine[me].dirty = true;
       engine[me].held = 0;
       engine[me].loading = engine[me].pausing;
       engine[me].pausing = 0 }
  /* Bytes land, bucket by bucket, in any order with whatever else happens. */
  :: atomic { engine[me].loading && engine[me].first != version_of[engine[me].loading] ->
       engine[me].first = version_of[engine[me].loading] }
  :: atomic { engine[me].loading && engine[me].first == version_of[engine[me].loading] ->
       engine[me].second = version_of[engine[me].loading];
       if
       :: FENCE -> assert(engine[me].loading == engine[me].max_epoch)
       :: else
       fi;
       engine[me].dirty = false;
       if
       :: from[me].verified[engine[me].loading] = true
       :: OPEN ->
            engine[me].first = engine[me].first + OTHER;
            engine[me].second = engine[me].second + OTHER;
            from[me].other[engine[me].loading] = true
       fi;
       engine[me].held = engine[me].second;
       engine[me].loading = 0 }
  /* Commit: whoever holds exactly that version serves it. */
  :: atomic {
       select (e : 1 .. EPOCHS);
       if
       :: commit_said[e] && (!FENCE || e >= engine[me].max_epoch) ->
            judge_commit(e);
            engine[me].max_epoch = (e > engine[me].max_epoch -> e : engine[me].max_epoch);
            if
            :: (engine[me].held == version_of[e] || (!TABLE && engine[me].held % OTHER == version_of[e])) &&
                 !engine[me].dirty ->
                 engine[me].paused = false;
                 assert(version_of[e] >= engine[me].served);     /* promise 3: nobody old has it go back */
                 engine[me].served = version_of[e]
            :: else
            fi;
            engine[me].loading = 0;              /* what runs under a lower epoch is called off */
            engine[me].pausing = 0
       :: abort_said[e] && (!FENCE || e >= engine[me].max_epoch) ->
            engine[me].max_epoch = (e > engine[me].max_epoch -> e : engine[me].max_epoch);
            engine[me].loading = 0;              /* what runs is called off */
            engine[me].pausing = 0;
            if
            :: !engine[me].dirty && (engine[me].held == 0 || engine[me].held <= disk_committed) ->
                 engine[me].paused = false       /* clean: its old weights */
            :: else
            fi
       :: else -> skip
       fi;
       e = 0 }
  /* The agent crashes: what it knew is gone, but for its record; the server goes on as it was. */
  :: atomic { agent_crashes < AGENT_CRASHES ->
       agent_crashes++;
       engine[me].loading = 0;
       engine[me].max_epoch = engine[me].recorded;
       if
       :: !DIRTY -> engine[me].dirty = false; engine[me].paused = false
       :: DIRTY && engine[me].pausing -> engine[me].dirty = true; engine[me].paused = true   /* as its record says */
       :: else
       fi;
       engine[me].pausing = 0 }
  /* The server is launched again with the weights of its launch; the agent pauses it until it is proven. */
  :: atomic { agent_crashes < AGENT_CRASHES ->
       agent_crashes++;
       engine[me].first = 0; engine[me].second = 0; engine[me].loading = 0; engine[me].pausing = 0;
       engine[me].held = 0; engine[me].served = 0; engine[me].dirty = false; engine[me].paused = false }
  :: atomic { epoch == EPOCHS && !in_round && up -> break }
  od
}

active proctype Judge() {
  byte seen = 0;
  do
  :: atomic { SERVES_MIXED(0) || SERVES_MIXED(ENGINES - 1) -> assert(false) }         /* promise 1 */
  :: atomic { SERVES_OTHER(0) || SERVES_OTHER(ENGINES - 1) -> assert(false) }         /* promise 5 */
  :: atomic { disk_committed < seen -> assert(false) }                                 /* promise 2 */
  :: atomic { disk_committed > seen -> seen = disk_committed }
  :: atomic { highest_committed > disk_committed -> assert(false) }                    /* promise 2: said, then lost */
  :: timeout -> break
  od
}

init {
  atomic {
    run Coordinator();
    run Agent(0);
    run Agent(1)
  }
}
