"""Word lists from which `corpus` makes text for the tokenizer and for noise around the dialogues.

Data only. Order matters: earlier words of a list are drawn more often.
"""

COMMON = """
the of and to a in is that it for you was with on as are be this have or at not from by but what
all were when we there can an your which their said if do will each about how up out them then she
many some so these would other into has more her two like him see time could no make than first
been its who now people my made over did down only way find use may long little very after words
called just where most know get through back much before go good new write our used me man too any
day same right look think also around another came come work three word must because does part even
place well such here take why things help put years different away again off went old number great
tell men say small every found still between name should home big give air line set own under read
last never us left end along while might next sound below saw something thought both few those
always looked show large often together asked house world going want school important until form
food keep children feet land side without boy once animals life enough took sometimes four head
above kind began almost live page got earth need far hand high year mother light parts country
father let night following picture being study second eyes soon times story boys since white days
ever paper hard near sentence better best across during today others however sure means knew try
told young miles sun ways thing whole hear example heard several change answer room sea against top
turned learn point city play toward five using himself usually money seen car morning given order
red door sure become body hour plan half hold later low mind move music night open person possible
problem question reach ready real reason rest river road run science short simple since six ten
space special start state stay step stop street strong table talk team test thank thousand tree
true turn understand unit voice wait walk war warm watch water week whether wind within woman wonder
yes yet able act add afternoon age ago agree allow already although among amount appear area ask
base beautiful bed behind believe black blue book bring brought build busy buy care carry cause
center certain chance check child choose class clean clear close cold color common complete
contain continue cool correct cost count course cover create cross cut dark decide deep develop dog
done draw drive drop dry early east easy eat edge eight energy evening exact experience explain eye
face fact fall family fast feel field figure fill final fine finish fire fish floor flow follow
foot force four free friend front full game general glass gold govern green ground group grow
guess happen heat heavy heart history horse hot hundred idea inch include interest iron island job
join jump kept key king lay lead leave less letter level listen lost lot love machine main map mark
market matter mean measure meet member middle milk million minute miss modern moment month moon
mountain mouth moving nature never nine north nothing notice oil opposite original outside oxygen
pair paint party pass past pattern pay per perhaps piece pose position power present press price
print probable produce product property provide pull push quick quiet quite race rain raise range
rather record region remember repeat represent require result rich ride ring rise rock roll rule
safe sail salt sand season section seem self send sense serve seven shape share sharp ship shop
shore shoulder sign silent similar single sit size skin sky sleep slow snow soft soil soldier solve
son song south speak speed spell spend spoke spring square stand star station steel stick stone
stood store straight strange student subject success sudden suggest summer supply support surface
surprise sweet swim system tail taste teach teeth third though tiny tire tone total touch town
trade train travel trip trouble truck type usual valley value vary view village visit wall wash
weather weight west wheel wife wild window winter wish wood yard yellow zero please don't can't
won't it's I'm you're doesn't isn't
"""

TECHNICAL = """
file tool user message session system model agent path command name type string object text
request response task data id value list default key run call content result output input error
time status context memory workspace channel reply description properties required number boolean
array parameters function config server token prompt assistant directory skill skills tools files
messages commands sessions agents subagent optional exec read write edit update delete create send
search fetch load save start stop exact current active available enabled disabled allowed denied
explicit automatic manual internal external public private local remote global session_id timeout
limit offset count size length index query filter sort match pattern regex replace patch diff line
lines range block code script shell process terminal environment variable option flag argument
schema format json yaml markdown html http https url link host port address network client gateway
node device browser image audio video voice screen window page button event handler hook plugin
module package import export version release branch commit repository project issue review test
tests check verify validate policy approval permission security secret password credential access
account profile owner group member role instruction instructions guidance rules reminder note notes
summary history transcript conversation topic thread heartbeat schedule cron job queue batch worker
background foreground runtime provider service database table column row record field entry item
store cache buffer stream chunk bytes encoding decode encode parse render template metadata header
body footer title label comment documentation reference example usage details feature behavior
setting settings configuration preference parameter definition interface method class instance
constructor return returns raise exception warning failure success retry attempt delay interval
seconds minutes hours timezone date timestamp created updated modified deleted expires pending
completed failed running cancelled unknown invalid missing empty null true false none only before
after unless instead directly otherwise never always prefer avoid ensure include exclude apply
resolve follow respond deliver report confirm explain request inspect discover install restart
deploy build compile execute invoke spawn yield poll wait notify subscribe publish connect attach
download upload backup restore archive compress extract copy move rename append prepend insert
remove clear reset toggle enable disable register configure initialize shutdown relative absolute
temporary persistent hidden visible unique multiple single nested parent child children root leaf
source target destination origin upstream downstream primary secondary fallback additional
maximum minimum approximate sensitive relevant specific previous original complete partial final
identifier namespace reasoning thinking capabilities automation automations dashboard canvas
openclaw claw agentId sessionId maxLength minLength additionalProperties anyOf enum items const
"""

SUFFIXES = ("", "", "", "", "", "", "s", "ed", "ing", "ly", "er", "ion", "able", "ment", "al")
PREFIXES = ("", "", "", "", "", "", "", "", "re", "un", "pre", "non-", "sub", "auto", "multi-")
EXTENSIONS = ("md", "json", "py", "ts", "js", "txt", "sh", "yaml", "toml", "html", "log", "sqlite")
ROOTS = (
    "/home/user",
    "/tmp",
    "/usr/local",
    "~/.config",
    "./src",
    "/var/log",
    "~/work",
    "/etc",
    "..",
)
JSON_KEYS = ("type", "description", "properties", "required", "string", "object", "name", "items")
