/* Bugs planted on purpose, for the test of the simulator (test_sim_bugs.c): SIM_BUG(n) is
 * true where that test has chosen bug n, and a constant false in everything else. Those of the
 * cores are in copies of these (sim_bugs.cmake), those of the simulated kernel (1, 10) and of
 * spilling (9), of pins' memory (33) and of holding (35) in the simulator. Each bug has its number
 * here.
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
 *  30  a copy of a step begins while the update of the step before is under way
 *  31  what is left of a unit is not copied before its update where some of it is copied already
 *  32  an owner does not keep that its part of a fork is full
 *  33  the memory of a pin is given another step while somebody else looks at it
 *  34  an owner does not keep that its part is being dropped
 *  35  a part that waits for owner 0's word goes when the model is held, before that is dropped
 *  36  owner 0 forgets which part is its own before it drops it
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
