/* Bugs planted on purpose, for the test of the simulator (test_sim_bugs.c): SIM_BUG(n) is
 * true where that test has chosen bug n, and a constant false in everything else. Those of the
 * cores are in copies of these (sim_bugs.cmake), those of the simulated kernel (1, 10) and of
 * spilling (9), of pins' memory (33), of holding (35), of workers (71 to 75), of puts (76) and of
 * replicas (81 to 92) in the simulator. Each bug has its number here.
 *
 *   1  the word that a kernel is done is stored before its last block
 *   2  the commits word is stored before the record it vouches for
 *   3  credit is given while the gradient only waits in its slot
 *   4  recovery forgets gradients that wait for their turn and have no sender any more
 *   5  a worker sends its decision to all owners at once
 *   6  recovery takes the last gradient once more, under another number of operation
 *   7  the window of replies takes an old number for a new one
 *   8  an operation's number differs from one process to the next
 *   9  a gradient counts as spilled before its bytes are copied
 *  10  a word that a kernel is done is never stored
 *  11  an owner that has answered Prepare gives the step up all the same
 *  12  that it has answered Prepare is not kept
 *  13  owner 0 takes a put into a step that has begun
 *  14  the updates of units are counted when the commit is there already
 *  15  an update of the model counts for units that were idle in it
 *  16  settings count before they are written
 *  17  settings are said to be of a step whose Prepare was answered without them
 *  18  the history's row of a step is written when the commit is there already
 *  19  the hash of a gradient is compared with that of another group
 *  20  gradients are compared that came when a Prepare of the step was answered
 *  21  gradients are compared again when a step is reset that a put has begun in
 *  30  a copy of a step begins while the update of the step before is under way
 *  31  what is left of a unit is not copied before its update where some of it is copied already
 *  32  an owner does not keep that its part of a fork is full
 *  33  the memory of a pin is given another step while somebody else looks at it
 *  34  an owner does not keep that its part is being dropped
 *  35  a part that waits for owner 0's word goes when the model is held, before that is dropped
 *  36  owner 0 forgets which part is its own before it drops it
 *  40  owner 0 says the number of micro-batches of the step behind the next one
 *  41  each owner says it of its own
 *  42  a successor does not know the number, and has the most there can be
 *  50  that a stopped model goes on is kept as of a step before the one that was stopped
 *  51  a stop is forgotten with the next commit
 *  52  a guard's limits lack the last step
 *  53  what windows of units have of later steps does not go back
 *  54  a step has as many micro-batches as the one before
 *  55  a mean is over the gradients of earlier steps with more micro-batches, too
 *  56  what waits of a step with fewer micro-batches lies elsewhere in the ledger
 *  57  the norms of units in a step are written when the commit is there already
 *  60  an attempt that begins with a rewind has a round that was there before
 *  61  what was let go on behind the step where a model goes back to stays so
 *  62  a rewind is over before the words of the step are there
 *  63  a snapshot that a rewind holds is given up for another
 *  64  snapshots of steps that were given up stay
 *  66  owner 0 goes back before the others hold the snapshot
 *  67  a request of before a rewind gets what is on record since
 *  68  what owners answer before and after a rewind is taken together
 *  69  settings do not go back
 *  71  a worker takes a rewind for known that came while it settled
 *  72  a worker passes decisions on in whatever attempt
 *  73  a worker returns what it read while a snapshot was copied back
 *  74  a pin of a step that was given up is shared
 *  75  a worker goes on with an owner that has made the model anew
 *  76  owner 0 lets a put of before a rewind begin
 *  79  what owner 0 has recorded counts, though it is lost and its replica has not
 *  80  owner 0's replica is asked to commit with all others, and nobody anew where it has its place
 *  81  leases are not asked for from the beginning where a replica takes its owner's place
 *  82  a replica takes its owner's place before it has come as far
 *  83  what the others hand out is asked of them, though owner 0 was lost in between
 *  84  a view is changed, whatever it is by then
 *  85  a gradient is told to owners before replicas
 *  86  what is settled is of who was ahead, though another one is in its place
 *  87  replicas are left out where a worker settles
 *  89  what was said of a step beside a member that is lost counts
 *  90  a decision must be on record, though who had it is lost
 *  91  a daemon takes in who has an older view than it was told
 *  92  sessions of older views go on when a daemon is told of a newer one
 */
#ifndef SHD_TESTS_SIM_SIM_BUG_H
#define SHD_TESTS_SIM_SIM_BUG_H

#include <stdbool.h>

#ifdef SHD_SIM_BUGS
#include <stdint.h>
extern uint32_t sim_bug; /* 0: none */
#define SIM_BUG(n) (sim_bug == (n))
#else
#define SIM_BUG(n) false
#endif

#endif
