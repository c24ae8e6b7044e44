/* shardctl replay: a recorded step is computed again, beside the run, from a snapshot before it. */
#ifndef SHD_CTL_REPLAY_H
#define SHD_CTL_REPLAY_H

int verb_replay(int argc, char **argv);

#endif
