/* shardctl keys: which hosts may talk to each other, and by which keys. */
#ifndef SHD_CTL_KEYS_H
#define SHD_CTL_KEYS_H

int verb_keys(int argc, char **argv);

#endif
