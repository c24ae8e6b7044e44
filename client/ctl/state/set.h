/* shardctl set: change what is trained, with moments kept. */
#ifndef SHD_CTL_SET_H
#define SHD_CTL_SET_H

int verb_set(int argc, char **argv);

#endif
