/* shardctl snapshot, snapshots and rewind: steps kept in the owners' memory, and going back to one.
 */
#ifndef SHD_CTL_REWIND_H
#define SHD_CTL_REWIND_H

int verb_snapshot(int argc, char **argv);
int verb_snapshots(int argc, char **argv);
int verb_rewind(int argc, char **argv);

#endif
