/* shardctl dashboard: a page that shows all daemons of this machine. */
#ifndef SHD_CTL_DASHBOARD_H
#define SHD_CTL_DASHBOARD_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_dashboard(int argc, char **argv);

#endif
