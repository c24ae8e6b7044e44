/* shardctl run, up and down: a command as workers beside daemons of its own; daemons that stay,
 * with a keeper; the end of these. */
#ifndef SHD_CTL_RUN_H
#define SHD_CTL_RUN_H

int verb_run(int argc, char **argv);
int verb_up(int argc, char **argv);
int verb_down(int argc, char **argv);

#endif
